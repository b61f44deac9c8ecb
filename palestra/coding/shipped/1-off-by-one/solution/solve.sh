git apply - <<'END'
--- a/total.py
+++ b/total.py
@@ -1,2 +1,2 @@
 def total(n):
-    return sum(range(1, n))
+    return sum(range(1, n + 1))
END
