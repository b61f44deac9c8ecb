git apply - <<'END'
--- a/add.py
+++ b/add.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
END
