git apply - <<'END'
--- a/slug.py
+++ b/slug.py
@@ -1,2 +1,5 @@
+import re
+
+
 def slug(title):
-    return title.lower().replace(" ", "-")
+    return re.sub("[^a-z0-9]+", "-", title.lower()).strip("-")
END
