#!/bin/sh
mv $1.1 $1.2
cp $1 $1.1
