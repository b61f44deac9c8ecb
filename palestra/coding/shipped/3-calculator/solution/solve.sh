git apply - <<'END'
--- a/calc.py
+++ b/calc.py
@@ -1,4 +1,59 @@
+import re
 import sys
+from fractions import Fraction
 
-left, sign, right = sys.argv[1].split()
-print(int(left) + int(right))
+TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|[-+*/()])")
+
+
+def tokens(text):
+    found, place = [], 0
+    text = text.rstrip()
+    while place < len(text):
+        match = TOKEN.match(text, place)
+        if not match:
+            raise SyntaxError
+        found.append(match[1])
+        place = match.end()
+    return found
+
+
+def total(rest):
+    value = product(rest)
+    while rest and rest[0] in "+-":
+        value = value + product(rest) if rest.pop(0) == "+" else value - product(rest)
+    return value
+
+
+def product(rest):
+    value = factor(rest)
+    while rest and rest[0] in "*/":
+        value = value * factor(rest) if rest.pop(0) == "*" else value / factor(rest)
+    return value
+
+
+def factor(rest):
+    if not rest:
+        raise SyntaxError
+    token = rest.pop(0)
+    if token == "-":
+        return -factor(rest)
+    if token == "(":
+        value = total(rest)
+        if not rest or rest.pop(0) != ")":
+            raise SyntaxError
+        return value
+    if not token[0].isdigit():
+        raise SyntaxError
+    return Fraction(token)
+
+
+try:
+    rest = tokens(sys.argv[1])
+    value = total(rest)
+    if rest:
+        raise SyntaxError
+except SyntaxError:
+    sys.exit(print("syntax error") or 1)
+except ZeroDivisionError:
+    sys.exit(print("division by zero") or 1)
+print(value if value.denominator == 1 else f"{float(value):.6f}".rstrip("0"))
END
