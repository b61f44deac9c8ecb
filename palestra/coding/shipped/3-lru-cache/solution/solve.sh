git apply - <<'END'
--- a/cache.py
+++ b/cache.py
@@ -2,11 +2,18 @@
     def __init__(self, size):
         self.size = size
         self.items = {}
+        self.hits = self.misses = 0
 
-    def get(self, key):
-        return self.items.get(key)
+    def get(self, key, default=None):
+        if key not in self.items:
+            self.misses += 1
+            return default
+        self.hits += 1
+        self.items[key] = self.items.pop(key)
+        return self.items[key]
 
     def put(self, key, value):
+        self.items.pop(key, None)
         self.items[key] = value
         if len(self.items) > self.size:
             del self.items[next(iter(self.items))]
END
