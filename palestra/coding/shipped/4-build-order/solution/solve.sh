git apply - <<'END'
--- a/graph.py
+++ b/graph.py
@@ -1,2 +1,43 @@
 def read(file):
-    return dict(line.split(":") for line in file)
+    needs = {}
+    for line in file:
+        line = line.split("#")[0].strip()
+        if line:
+            name, _, rest = line.partition(":")
+            needs.setdefault(name.strip(), set()).update(rest.split())
+    for name in {one for many in needs.values() for one in many}:
+        needs.setdefault(name, set())
+    return needs
+
+
+def wanted(needs, targets):
+    found, waiting = set(), list(targets)
+    while waiting:
+        name = waiting.pop()
+        if name not in found:
+            found.add(name)
+            waiting.extend(needs[name])
+    return found
+
+
+def cycle(needs, names):
+    """A cycle among names, each of which needs another of them."""
+    path = [min(names)]
+    while True:
+        following = min(needs[path[-1]] & names)
+        if following in path:
+            found = path[path.index(following) :]
+            first = found.index(min(found))
+            return [*found[first:], *found[:first], min(found)]
+        path.append(following)
+
+
+def order(needs, targets):
+    left, found = wanted(needs, targets), []
+    while left:
+        ready = [name for name in left if not needs[name] & left]
+        if not ready:
+            raise ValueError("cycle: " + " -> ".join(cycle(needs, left)))
+        found.append(min(ready))
+        left.remove(found[-1])
+    return found
--- a/order.py
+++ b/order.py
@@ -1,4 +1,13 @@
 import sys
 
-for line in open(sys.argv[1]):
-    print(line.split(":")[0])
+from graph import order, read
+
+with open(sys.argv[1]) as file:
+    needs = read(file)
+for name in sys.argv[2:]:
+    if name not in needs:
+        sys.exit(print("unknown:", name) or 1)
+try:
+    print(*order(needs, sys.argv[2:] or needs), sep="\n")
+except ValueError as error:
+    sys.exit(print(error) or 1)
END
