git apply - <<'END'
--- a/report.sh
+++ b/report.sh
@@ -1,2 +1,6 @@
 #!/bin/sh
-grep -c ERROR "$1"/*
+for file in "$1"/*.log; do
+    [ -f "$file" ] || continue
+    count=$(grep -cw ERROR "$file")
+    [ "$count" -eq 0 ] || printf '%s\t%s\n' "$count" "${file##*/}"
+done | LC_ALL=C sort -k1,1nr -k2
END
