git apply - <<'END'
--- a/justify.py
+++ b/justify.py
@@ -1,4 +1,28 @@
+import re
 import sys
-import textwrap
 
-print(textwrap.fill(sys.stdin.read(), int(sys.argv[1])))
+
+def lines(words, width):
+    found = [[]]
+    for word in words:
+        if found[-1] and len(" ".join([*found[-1], word])) > width:
+            found.append([])
+        found[-1].append(word)
+    return found
+
+
+def spread(words, width):
+    gaps = len(words) - 1
+    if not gaps:
+        return words[0]
+    blanks = width - sum(map(len, words))
+    each, wider = divmod(blanks, gaps)
+    return "".join(word + " " * (each + (n < wider)) for n, word in enumerate(words[:-1])) + words[-1]
+
+
+width = int(sys.argv[1])
+found = []
+for paragraph in re.split(r"\n\s*\n", sys.stdin.read().strip()):
+    *others, last = lines(paragraph.split(), width)
+    found.append("\n".join([*(spread(one, width) for one in others), " ".join(last)]))
+print("\n\n".join(found))
END
