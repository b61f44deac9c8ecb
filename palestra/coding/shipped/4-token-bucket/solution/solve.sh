git apply - <<'END'
--- a/bucket.py
+++ b/bucket.py
@@ -1,13 +1,48 @@
+CLOSE = 1e-6  # tokens that are this close to whole ones are there
+
+
 class Bucket:
     def __init__(self, rate, size, clock):
         self.rate, self.size, self.clock = rate, size, clock
         self.tokens, self.last = size, clock()
 
+    def _fill(self):
+        now = self.clock()
+        if now > self.last:
+            self.tokens = min(self.size, self.tokens + (now - self.last) * self.rate)
+            self.last = now
+
     def take(self, n=1):
-        now = self.clock()
-        self.tokens += int((now - self.last) * self.rate)
-        self.last = now
-        if self.tokens > n:
-            self.tokens -= n
-            return True
-        return False
+        if self.wait_s(n) != 0.0:
+            return False
+        self.tokens -= n
+        return True
+
+    def wait_s(self, n=1):
+        self._fill()
+        missing = n - self.tokens
+        if missing <= CLOSE:
+            return 0.0
+        return missing / self.rate if n <= self.size and self.rate > 0 else None
+
+    @property
+    def is_full(self):
+        self._fill()
+        return self.tokens >= self.size - CLOSE
+
+
+class Limits:
+    def __init__(self, rate, size, clock, most=1000):
+        self.rate, self.size, self.clock, self.most = rate, size, clock, most
+        self.buckets = {}
+
+    def take(self, key, n=1):
+        bucket = self.buckets.pop(key, None) or Bucket(self.rate, self.size, self.clock)
+        self.buckets[key] = bucket
+        is_taken = bucket.take(n)
+        if len(self.buckets) > self.most:
+            others = [one for one in self.buckets if one != key]
+            full = [one for one in others if self.buckets[one].is_full]
+            if full or others:
+                del self.buckets[(full or others)[0]]
+        return is_taken
END
