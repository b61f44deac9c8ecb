git apply - <<'END'
--- a/stack.py
+++ b/stack.py
@@ -1,11 +1,16 @@
 class Stack:
-    items = []
-
     def __init__(self, size):
         self.size = size
+        self.items = []
 
     def push(self, item):
+        if len(self.items) >= self.size:
+            return False
         self.items.append(item)
+        return True
 
     def pop(self):
-        return self.items.pop()
+        return self.items.pop() if self.items else None
+
+    def __len__(self):
+        return len(self.items)
END
