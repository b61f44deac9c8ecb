git apply - <<'END'
--- a/tables.py
+++ b/tables.py
@@ -1,4 +1,59 @@
+import re
 import sys
 
-for line in sys.stdin:
-    print(" | ".join(cell.strip() for cell in line.split("|")))
+RULE = re.compile(r":?-+:?")
+
+
+def cells(line):
+    text = line.strip()[1:]
+    text = text[:-1] if re.search(r"(?<!\\)\|$", text) else text
+    return [cell.strip() for cell in re.split(r"(?<!\\)\|", text)]
+
+
+def is_rule(line):
+    return all(RULE.fullmatch(cell) for cell in cells(line))
+
+
+def aligned(cell, width, rule):
+    if rule.startswith(":") and rule.endswith(":"):
+        left = (width - len(cell)) // 2
+        return " " * left + cell + " " * (width - len(cell) - left)
+    return cell.rjust(width) if rule.endswith(":") else cell.ljust(width)
+
+
+def formatted(lines):
+    rows = [cells(line) for line in lines]
+    rules, columns = rows[1], len(rows[0])
+    if any(len(row) > columns for row in rows):
+        return lines
+    rows = [row + [""] * (columns - len(row)) for row in rows]
+    rules = [rule or "---" for rule in rows[1]]
+    widths = [max(3, *(len(row[n]) for row in (rows[0], *rows[2:]))) for n in range(columns)]
+    rows[1] = [
+        (":" if rule[0] == ":" else "-") + "-" * (width - 2) + (":" if rule[-1] == ":" else "-")
+        for rule, width in zip(rules, widths)
+    ]
+    indent = re.match(r"\s*", lines[0])[0]
+    return [indent + "| " + " | ".join(map(aligned, row, widths, rules)) + " |" for row in rows]
+
+
+def main():
+    waiting, is_code = [], False
+
+    def flush():
+        found = formatted(waiting) if len(waiting) > 1 and is_rule(waiting[1]) else waiting
+        print("".join(f"{line}\n" for line in found), end="")
+        waiting.clear()
+
+    for line in sys.stdin.read().splitlines():
+        if line.lstrip().startswith("```"):
+            is_code = not is_code
+        if line.lstrip().startswith("|") and not is_code:
+            waiting.append(line)
+            continue
+        flush()
+        print(line)
+    flush()
+
+
+main()
END
