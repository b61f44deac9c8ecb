git apply - <<'END'
--- a/pointer.py
+++ b/pointer.py
@@ -1,4 +1,60 @@
+import copy
+
+
+def names(pointer):
+    if pointer and not pointer.startswith("/"):
+        raise ValueError(f"a pointer begins with /: {pointer}")
+    return [name.replace("~1", "/").replace("~0", "~") for name in pointer.split("/")[1:]]
+
+
+def index(items, name):
+    if not (name.isascii() and name.isdigit()) or (name[0] == "0" and name != "0"):
+        raise LookupError(name)
+    return int(name)
+
+
+def step(holder, name):
+    if isinstance(holder, list):
+        return holder[index(holder, name)]
+    if isinstance(holder, dict):
+        return holder[name]
+    raise LookupError(name)
+
+
 def get(document, pointer):
-    for name in pointer.split("/"):
-        document = document[name]
+    for name in names(pointer):
+        document = step(document, name)
     return document
+
+
+def put(document, pointer, value):
+    if not pointer:
+        return value
+    document = copy.deepcopy(document)
+    *path, last = names(pointer)
+    holder = document
+    for name in path:
+        holder = step(holder, name)
+    if isinstance(holder, list):
+        place = len(holder) if last == "-" else index(holder, last)
+        if place > len(holder):
+            raise LookupError(last)
+        holder.insert(place, value)
+    elif isinstance(holder, dict):
+        holder[last] = value
+    else:
+        raise LookupError(last)
+    return document
+
+
+def remove(document, pointer):
+    if not pointer:
+        return None
+    document = copy.deepcopy(document)
+    *path, last = names(pointer)
+    holder = document
+    for name in path:
+        holder = step(holder, name)
+    step(holder, last)
+    del holder[index(holder, last) if isinstance(holder, list) else last]
+    return document
END
