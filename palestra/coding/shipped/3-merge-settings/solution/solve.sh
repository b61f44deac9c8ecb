git apply - <<'END'
--- a/settings.py
+++ b/settings.py
@@ -1,3 +1,14 @@
+import copy
+
+
 def merge(base, changes):
-    base.update(changes)
-    return base
+    found = copy.deepcopy(base)
+    for key, value in changes.items():
+        if value is None:
+            found.pop(key, None)
+        elif isinstance(value, dict):
+            old = found.get(key)
+            found[key] = merge(old if isinstance(old, dict) else {}, value)
+        else:
+            found[key] = copy.deepcopy(value)
+    return found
--- a/main.py
+++ b/main.py
@@ -1,6 +1,7 @@
 import json
 import sys
+from functools import reduce
 
 from settings import merge
 
-print(json.dumps(merge(*(json.load(open(name)) for name in sys.argv[1:]))))
+print(json.dumps(reduce(merge, (json.load(open(name)) for name in sys.argv[1:]), {}), sort_keys=True))
END
