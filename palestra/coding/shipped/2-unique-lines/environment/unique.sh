#!/bin/sh
sort -u
