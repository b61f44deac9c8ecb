git apply - <<'END'
--- a/unique.sh
+++ b/unique.sh
@@ -1,2 +1,2 @@
 #!/bin/sh
-sort -u
+awk '!seen[tolower($0)]++'
END
