git apply - <<'END'
--- a/todo.sh
+++ b/todo.sh
@@ -1,2 +1,52 @@
 #!/bin/sh
-echo $* >> todo.txt
+# Lines: number, tab, mark, tab, text. The first has the last number that was used.
+file=${TODO_FILE:-todo.txt}
+
+usage() {
+    echo "usage: todo.sh add TEXT… | done N… | list [TEXT] | clean" >&2
+    exit 2
+}
+
+rewrite() {
+    awk "$@" < "$file" > "$file.new" && mv "$file.new" "$file"
+}
+
+command=$1
+[ $# -eq 0 ] || shift
+case $command in
+    add)
+        [ -n "$*" ] || usage
+        [ -f "$file" ] || echo 0 > "$file"
+        number=$(($(head -n 1 "$file") + 1))
+        { echo "$number"; tail -n +2 "$file"; printf '%s\t \t%s\n' "$number" "$*"; } > "$file.new"
+        mv "$file.new" "$file"
+        echo "$number"
+        ;;
+    done)
+        [ $# -gt 0 ] || usage
+        status=0
+        for number in "$@"; do
+            case $number in *[!0-9]* | '') number=-1 ;; esac
+            if [ -f "$file" ] && tail -n +2 "$file" | cut -f 1 | grep -qx -e "$number"; then
+                rewrite -F '\t' -v OFS='\t' -v number="$number" 'NR > 1 && $1 == number { sub(/\t \t/, "\tx\t") } { print }'
+            else
+                echo "no item $number" >&2
+                status=1
+            fi
+        done
+        exit $status
+        ;;
+    list)
+        [ -f "$file" ] || exit 0
+        TEXT=$* awk -F '\t' 'NR > 1 {
+            text = substr($0, length($1) + length($2) + 3)
+            if (index(tolower(text), tolower(ENVIRON["TEXT"]))) print $1 " [" $2 "] " text
+        }' "$file"
+        ;;
+    clean)
+        [ -f "$file" ] || { echo 0; exit 0; }
+        tail -n +2 "$file" | cut -f 2 | grep -c x
+        rewrite -F '\t' 'NR == 1 || $2 != "x"'
+        ;;
+    *) usage ;;
+esac
END
