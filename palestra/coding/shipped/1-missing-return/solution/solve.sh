git apply - <<'END'
--- a/double.py
+++ b/double.py
@@ -1,2 +1,2 @@
 def double(x):
-    2 * x
+    return 2 * x
END
