git apply - <<'END'
--- a/edit.py
+++ b/edit.py
@@ -1,8 +1,51 @@
 import json
+import re
 import sys
 
-lines = open(sys.argv[1]).read().split("\n")
-for edit in json.load(open(sys.argv[2])):
-    line, column = edit["start"]
-    lines[line] = lines[line][:column] + edit["text"]
-open(sys.argv[1], "w").write("\n".join(lines))
+
+def offsets(text):
+    """Start and end of every line, the one after the last included."""
+    starts = [0, *(match.end() for match in re.finditer("\n", text))]
+    if starts[-1] != len(text):
+        starts.append(len(text))
+    ends = [len(text[a:b].rstrip("\r\n")) + a for a, b in zip(starts, starts[1:])]
+    return list(zip(starts, [*ends, len(text)]))
+
+
+def offset(lines, line, column):
+    if not 1 <= line <= len(lines):
+        raise ValueError
+    start, end = lines[line - 1]
+    if not 1 <= column <= end - start + 1:
+        raise ValueError
+    return start + column - 1
+
+
+def changed(text, edits):
+    lines, found = offsets(text), []
+    for number, edit in enumerate(edits, 1):
+        try:
+            start, end = offset(lines, *edit["start"]), offset(lines, *edit["end"])
+        except ValueError:
+            sys.exit(print(f"edit {number}: bad place") or 1)
+        if end < start:
+            sys.exit(print(f"edit {number}: bad place") or 1)
+        found.append((start, end, number, edit["text"]))
+    for number, (start, end, *_) in enumerate(found):
+        for other, until, *_ in found[:number]:
+            is_inside = other < start < until if start == end else start < other < end if other == until else start < until and other < end
+            if is_inside:
+                sys.exit(print(f"edit {number + 1}: overlap") or 1)
+    whole, place = "", 0
+    for start, end, _, new in sorted(found, key=lambda one: (one[0], one[1] > one[0], one[2])):
+        whole += text[place:start] + new
+        place = end
+    return whole + text[place:]
+
+
+with open(sys.argv[1], newline="") as file:
+    text = file.read()
+with open(sys.argv[2]) as file:
+    text = changed(text, json.load(file))
+with open(sys.argv[1], "w", newline="") as file:
+    file.write(text)
END
