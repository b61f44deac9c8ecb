chmod +x run.sh
