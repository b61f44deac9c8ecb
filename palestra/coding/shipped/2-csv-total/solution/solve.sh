git apply - <<'END'
--- a/total.py
+++ b/total.py
@@ -1,5 +1,9 @@
+import csv
 import sys
 
-lines = open(sys.argv[1]).read().split("\n")
-index = lines[0].split(",").index(sys.argv[2])
-print(sum(float(line.split(",")[index]) for line in lines[1:]))
+with open(sys.argv[1], newline="") as file:
+    rows = csv.DictReader(file)
+    if sys.argv[2] not in (rows.fieldnames or []):
+        print("no column", sys.argv[2])
+        sys.exit(2)
+    print(f"{sum(float(row[sys.argv[2]] or 0) for row in rows):.2f}")
END
