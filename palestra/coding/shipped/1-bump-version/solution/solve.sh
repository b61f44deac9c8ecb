git apply - <<'END'
--- a/VERSION
+++ b/VERSION
@@ -1 +1 @@
-1.4.2
+1.5.0
END
