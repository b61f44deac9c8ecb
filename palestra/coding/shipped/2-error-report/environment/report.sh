#!/bin/sh
grep -c ERROR "$1"/*
