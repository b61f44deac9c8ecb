git apply - <<'END'
--- a/leap.py
+++ b/leap.py
@@ -2,8 +2,8 @@
 
 
 def is_leap(year):
-    return year % 4 == 0
+    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
 
 
 def days(year, month):
-    return DAYS[month]
+    return 29 if month == 2 and is_leap(year) else DAYS[month - 1]
END
