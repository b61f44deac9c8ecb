git apply - <<'END'
--- a/editor.py
+++ b/editor.py
@@ -1,11 +1,101 @@
+from contextlib import contextmanager
+
+
 class Editor:
-    def __init__(self):
-        self.text = ""
-        self.before = []
+    def __init__(self, text="", most=100):
+        self.text, self.most = text, most
+        self._undo, self._redo = [], []
+        self._typing = None
+        self._group = None
+        self._saved = 0
+
+    @property
+    def is_changed(self):
+        return self._saved != len(self._undo) or bool(self._group)
+
+    def save(self):
+        self.commit()
+        self._saved = len(self._undo)
+
+    def commit(self):
+        self._typing = None
 
     def insert(self, place, text):
-        self.before.append(self.text)
-        self.text = self.text[:place] + text + self.text[place:]
+        self._check(0, place)
+        if not text:
+            return
+        is_typing = self._typing == place and self._group is None
+        self._change(place, "", text, is_typing)
+        self._typing = None if any(sign in " \n" for sign in text) else place + len(text)
+
+    def delete(self, start, end):
+        self._check(start, end)
+        if start < end:
+            self._change(start, self.text[start:end], "", False)
+            self._typing = None
+
+    def _check(self, start, end):
+        if not 0 <= start <= end <= len(self.text):
+            raise IndexError(f"{start} to {end} is not in the text")
+
+    def _change(self, place, old, new, is_typing):
+        self._apply(place, old, new)
+        if self._group is not None:
+            self._group.append((place, old, new))
+            return
+        if is_typing:
+            self._undo[-1].append((place, old, new))
+            return
+        self._record([(place, old, new)])
+
+    def _apply(self, place, old, new):
+        self.text = self.text[:place] + new + self.text[place + len(old) :]
+
+    def _record(self, step):
+        if self._saved is not None and self._saved > len(self._undo):
+            self._saved = None
+        self._redo.clear()
+        self._undo.append(step)
+        if len(self._undo) > self.most:
+            del self._undo[0]
+            self._saved = None if not self._saved else self._saved - 1
+
+    def _reverse(self, step):
+        for place, old, new in reversed(step):
+            self._apply(place, new, old)
 
     def undo(self):
-        self.text = self.before[-1]
+        self.commit()
+        if not self._undo:
+            return False
+        self._redo.append(self._undo.pop())
+        self._reverse(self._redo[-1])
+        return True
+
+    def redo(self):
+        self.commit()
+        if not self._redo:
+            return False
+        self._undo.append(self._redo.pop())
+        for change in self._undo[-1]:
+            self._apply(*change)
+        return True
+
+    @contextmanager
+    def group(self):
+        if self._group is not None:
+            yield
+            return
+        self.commit()
+        self._group = []
+        try:
+            yield
+        except BaseException:
+            self._reverse(self._group)
+            self._group = None
+            self.commit()
+            raise
+        step, self._group = self._group, None
+        self.commit()
+        if step:
+            self._record(step)
END
