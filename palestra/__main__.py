from palestra.cli import main

main()
