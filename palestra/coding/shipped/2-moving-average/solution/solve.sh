git apply - <<'END'
--- a/averages.py
+++ b/averages.py
@@ -1,2 +1,4 @@
 def averages(values, n):
-    return [sum(values[i : i + n]) / n for i in range(len(values))]
+    if n < 1:
+        raise ValueError("n should be 1 or more")
+    return [round(sum(values[i : i + n]) / n, 2) for i in range(len(values) - n + 1)]
END
