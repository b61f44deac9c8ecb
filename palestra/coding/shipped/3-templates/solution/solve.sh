git apply - <<'END'
--- a/template.py
+++ b/template.py
@@ -1,4 +1,36 @@
+import re
+
+SECTION = re.compile(r"\{\{#\s*([\w.]+)\s*\}\}(.*?)\{\{/\s*\1\s*\}\}", re.DOTALL)
+NAME = re.compile(r"\{\{\{\s*([\w.]+)\s*\}\}\}|\{\{\s*([\w.]+)\s*\}\}")
+
+
+def look_up(name, values):
+    if name == "." and "." in values:
+        return values["."]
+    found = values
+    for part in name.split("."):
+        if not isinstance(found, dict) or part not in found:
+            raise KeyError(name)
+        found = found[part]
+    return found
+
+
+def escape(text):
+    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
+
+
+def flat(template, values):
+    def replaced(match):
+        text = str(look_up(match[1] or match[2], values))
+        return text if match[1] else escape(text)
+
+    return NAME.sub(replaced, template)
+
+
 def render(template, values):
-    for name, value in values.items():
-        template = template.replace("{{" + name + "}}", str(value))
-    return template
+    found, place = "", 0
+    for match in SECTION.finditer(template):
+        found += flat(template[place : match.start()], values)
+        found += "".join(flat(match[2], {**values, ".": item}) for item in look_up(match[1], values))
+        place = match.end()
+    return found + flat(template[place:], values)
END
