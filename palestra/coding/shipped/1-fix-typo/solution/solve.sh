git apply - <<'END'
--- a/README.md
+++ b/README.md
@@ -1,3 +1,3 @@
 # Kettle
 
-Turn teh kettle on, wait for teh click, pour teh water.
+Turn the kettle on, wait for the click, pour the water.
END
