git apply - <<'END'
--- a/retry.py
+++ b/retry.py
@@ -1,13 +1,22 @@
+import functools
 import time
 
 
-def retry(times):
+def retry(times, errors=Exception, pause=0.0, sleep=time.sleep):
+    if times < 1:
+        raise ValueError("times should be 1 or more")
+
     def decorate(function):
-        def wrapper():
-            for _ in range(times):
+        @functools.wraps(function)
+        def wrapper(*args, **kwargs):
+            for number in range(times):
                 try:
-                    return function()
-                except:
-                    time.sleep(1)
+                    return function(*args, **kwargs)
+                except errors:
+                    if number == times - 1:
+                        raise
+                    sleep(pause * 2**number)
+
         return wrapper
+
     return decorate
END
