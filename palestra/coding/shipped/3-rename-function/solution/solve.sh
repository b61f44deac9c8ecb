git apply - <<'END'
--- a/shop/__init__.py
+++ b/shop/__init__.py
@@ -1,3 +1,3 @@
-from shop.prices import calc
+from shop.prices import price_with_tax
 
-__all__ = ["calc"]
+__all__ = ["price_with_tax"]
--- a/shop/prices.py
+++ b/shop/prices.py
@@ -1,2 +1,10 @@
-def calc(price, tax):
-    return round(price * tax, 2)
+import warnings
+
+
+def price_with_tax(price, tax=20):
+    return round(price * (1 + tax / 100), 2)
+
+
+def calc(*args, **kwargs):
+    warnings.warn("calc is called price_with_tax", DeprecationWarning, stacklevel=2)
+    return price_with_tax(*args, **kwargs)
--- a/shop/cart.py
+++ b/shop/cart.py
@@ -2,4 +2,4 @@
 
 
 def total(cart):
-    return sum(prices.calc(price, 1.2) * count for price, count in cart)
+    return sum(prices.price_with_tax(price) * count for price, count in cart)
--- a/shop/receipt.py
+++ b/shop/receipt.py
@@ -1,5 +1,5 @@
-from shop.prices import calc
+from shop.prices import price_with_tax
 
 
 def line(name, price):
-    return f"{name}: {calc(price, 1.2):.2f}"
+    return f"{name}: {price_with_tax(price):.2f}"
END
