#!/bin/sh
echo running $1
