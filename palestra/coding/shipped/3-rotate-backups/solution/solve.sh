git apply - <<'END'
--- a/rotate.sh
+++ b/rotate.sh
@@ -1,3 +1,16 @@
 #!/bin/sh
-mv $1.1 $1.2
-cp $1 $1.1
+file=$1 count=$2
+case $count in '' | 0* | *[!0-9]*) echo "COUNT should be 1 or more" >&2; exit 2 ;; esac
+if [ ! -f "$file" ]; then
+    echo "$file: not found" >&2
+    exit 2
+fi
+if cmp -s "$file" "$file.1"; then exit 0; fi
+n=$count
+rm -f "$file.$count"
+while [ "$n" -gt 1 ]; do
+    before=$((n - 1))
+    if [ -f "$file.$before" ]; then mv "$file.$before" "$file.$n"; fi
+    n=$before
+done
+cp "$file" "$file.1"
END
