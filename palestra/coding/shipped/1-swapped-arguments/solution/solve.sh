git apply - <<'END'
--- a/greet.py
+++ b/greet.py
@@ -1,4 +1,4 @@
 import sys
 
 name, greeting = sys.argv[1:]
-print(f"{name}, {greeting}!")
+print(f"{greeting}, {name}!")
END
