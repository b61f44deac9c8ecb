git apply - <<'END'
--- a/ini.py
+++ b/ini.py
@@ -1,2 +1,18 @@
 def read(text):
-    return dict(line.split("=") for line in text.splitlines())
+    found, section, key = {}, "", None
+    for number, line in enumerate(text.splitlines(), 1):
+        bare = line.strip()
+        if not bare or bare[0] in "#;":
+            continue
+        if line[0].isspace() and key is not None:
+            found[section][key] += "\n" + bare
+        elif bare[0] == "[" and bare[-1] == "]":
+            section, key = bare[1:-1], None
+            found.setdefault(section, {})
+        elif "=" in bare and not bare.startswith("="):
+            name, _, value = bare.partition("=")
+            key = name.strip().lower()
+            found.setdefault(section, {})[key] = value.strip()
+        else:
+            raise ValueError(f"line {number}: {bare}")
+    return found
END
