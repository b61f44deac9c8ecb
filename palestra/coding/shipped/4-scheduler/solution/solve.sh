git apply - <<'END'
--- a/scheduler.py
+++ b/scheduler.py
@@ -1,11 +1,51 @@
+import heapq
+import itertools
+
+
 class Scheduler:
     def __init__(self):
         self.now = 0
-        self.calls = []
+        self._heap = []
+        self._planned = set()
+        self._numbers = itertools.count()
 
-    def at(self, time, call, *args):
-        self.calls.append((time, call, args))
+    @property
+    def pending(self):
+        return len(self._planned)
+
+    def at(self, time, call, *args, priority=0):
+        return self._plan(next(self._numbers), time, -priority, None, call, args)
+
+    def every(self, period, call, *args):
+        if period <= 0:
+            raise ValueError("the period should be above 0")
+        return self._plan(next(self._numbers), self.now + period, 0, period, call, args)
+
+    def _plan(self, handle, time, rank, period, call, args):
+        if time < self.now:
+            raise ValueError(f"{time} is past")
+        self._planned.add(handle)
+        heapq.heappush(self._heap, (time, rank, next(self._numbers), handle, period, call, args))
+        return handle
+
+    def cancel(self, handle):
+        if handle in self._planned:
+            self._planned.remove(handle)
+            return True
+        return False
 
     def run(self, until):
-        for time, call, args in sorted(self.calls):
+        count = 0
+        while self._heap and self._heap[0][0] <= until:
+            time, rank, _, handle, period, call, args = heapq.heappop(self._heap)
+            if handle not in self._planned:
+                continue
+            self.now = time
+            if period is None:
+                self._planned.remove(handle)
+            else:
+                self._plan(handle, time + period, rank, period, call, args)
+            count += 1
             call(*args)
+        self.now = max(self.now, until)
+        return count
END
