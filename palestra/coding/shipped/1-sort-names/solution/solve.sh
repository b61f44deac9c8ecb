LC_ALL=C sort -o names.txt names.txt
