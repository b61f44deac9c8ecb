git apply - <<'END'
--- a/match.py
+++ b/match.py
@@ -1,6 +1,55 @@
-import fnmatch
+import re
 import sys
 
-for line in sys.stdin:
-    if fnmatch.fnmatch(line.strip(), sys.argv[1]):
-        print(line.strip())
+
+def expanded(pattern):
+    """The patterns that the first outer braces stand for, until there are none."""
+    start = pattern.find("{")
+    if start < 0:
+        return [pattern]
+    depth, pieces, begin = 0, [], start + 1
+    for place in range(start, len(pattern)):
+        sign = pattern[place]
+        depth += (sign == "{") - (sign == "}")
+        if depth == 0 or (depth == 1 and sign == ","):
+            pieces.append(pattern[begin:place])
+            begin = place + 1
+        if depth == 0:
+            return [one for piece in pieces for one in expanded(pattern[:start] + piece + pattern[place + 1 :])]
+    return [pattern]
+
+
+def part_expression(part):
+    found = "" if part.startswith(".") else r"(?!\.)"
+    place = 0
+    while place < len(part):
+        sign = part[place]
+        end = part.find("]", place + 2)
+        if sign == "[" and end > 0:
+            inside = part[place + 1 : end].replace("\\", r"\\").replace("^", r"\^").replace("[", r"\[")
+            found += f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
+            place = end
+        else:
+            found += {"*": ".*", "?": "."}.get(sign, re.escape(sign))
+        place += 1
+    return re.compile(found, re.DOTALL)
+
+
+def parts_match(patterns, parts):
+    if not patterns:
+        return not parts
+    if patterns[0] == "**":
+        if parts_match(patterns[1:], parts):
+            return True
+        return bool(parts) and not parts[0].startswith(".") and parts_match(patterns, parts[1:])
+    return bool(parts) and bool(part_expression(patterns[0]).fullmatch(parts[0])) and parts_match(patterns[1:], parts[1:])
+
+
+def matches(pattern, path):
+    return any(parts_match(one.split("/"), path.split("/")) for one in expanded(pattern))
+
+
+if __name__ == "__main__":
+    for line in sys.stdin:
+        if matches(sys.argv[1], line.rstrip("\n")):
+            print(line, end="")
END
