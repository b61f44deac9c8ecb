git apply - <<'END'
--- a/ranges.py
+++ b/ranges.py
@@ -1,12 +1,18 @@
+from datetime import date, timedelta
+
+
 def merge(ranges):
     found = []
-    for start, end in ranges:
-        if found and start <= found[-1][1]:
-            found[-1] = (found[-1][0], end)
+    for start, end in sorted((date.fromisoformat(a), date.fromisoformat(b)) for a, b in ranges):
+        if end < start:
+            raise ValueError(f"{end} is before {start}")
+        if found and start <= found[-1][1] + timedelta(days=1):
+            found[-1] = (found[-1][0], max(end, found[-1][1]))
         else:
             found.append((start, end))
-    return found
+    return [(a.isoformat(), b.isoformat()) for a, b in found]
 
 
 def days(ranges):
-    return len(ranges)
+    whole = merge(ranges)
+    return sum((date.fromisoformat(b) - date.fromisoformat(a)).days + 1 for a, b in whole)
END
