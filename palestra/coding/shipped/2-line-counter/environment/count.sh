#!/bin/sh
wc -l "$1"
