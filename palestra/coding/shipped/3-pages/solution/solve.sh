git apply - <<'END'
--- a/pages.py
+++ b/pages.py
@@ -1,6 +1,8 @@
 def page(items, number, size):
-    return items[number * size : (number + 1) * size]
+    if number < 1 or size < 1:
+        raise ValueError("number and size begin at 1")
+    return items[(number - 1) * size : number * size]
 
 
 def count(items, size):
-    return len(items) // size
+    return max(1, -(-len(items) // size))
--- a/links.py
+++ b/links.py
@@ -1,2 +1,9 @@
 def links(number, last):
-    return " ".join(str(n) for n in range(number - 2, number + 3))
+    shown = sorted({1, last, *range(max(1, number - 2), min(last, number + 2) + 1)})
+    words, before = [], 0
+    for n in shown:
+        if n > before + 1:
+            words.append("…")
+        words.append(f"[{n}]" if n == number else str(n))
+        before = n
+    return " ".join(words)
END
