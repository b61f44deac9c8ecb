#!/bin/sh
echo $* >> todo.txt
