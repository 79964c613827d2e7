#!/usr/bin/env python3
"""Float32 weights from a checkpoint, of dslaunch's or of DeepSpeed's."""

from dslaunch.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
