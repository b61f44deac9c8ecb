git apply - <<'END'
--- a/roman.py
+++ b/roman.py
@@ -1,2 +1,12 @@
+SIGNS = [(1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL")]
+SIGNS += [(10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]
+
+
 def roman(n):
-    return "I" * n
+    if not 1 <= n <= 3999:
+        raise ValueError(n)
+    found = ""
+    for value, sign in SIGNS:
+        found += sign * (n // value)
+        n %= value
+    return found
END
