git apply - <<'END'
--- a/brackets.py
+++ b/brackets.py
@@ -1,2 +1,11 @@
+PAIRS = {")": "(", "]": "[", "}": "{"}
+
+
 def is_balanced(text):
-    return text.count("(") == text.count(")")
+    opened = []
+    for sign in text:
+        if sign in PAIRS.values():
+            opened.append(sign)
+        elif sign in PAIRS and (not opened or opened.pop() != PAIRS[sign]):
+            return False
+    return not opened
END
