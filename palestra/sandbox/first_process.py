"""The first process of a sandbox: a program of a few instructions that needs nothing of what is inside.

It imports the standard library only, because a helper process loads it.

Process 1 ends a sandbox by its own end, and it has none of the limits of commands. So no process inside may look into
its memory or change it: before it says a line, that it is there, it makes itself one that cannot be dumped, and the
kernel then refuses its files in /proc and `ptrace`, also to root inside. It lets the kernel remove processes without a
parent as they end, and ends itself when its input does. The machine code is assembled from
the text beside it: assemble it again after a change.
"""

from __future__ import annotations

import platform
import struct

PATH = "/.first-process"
"""Path of the program inside the sandbox."""
PROGRAMS = {
    "aarch64": """
        80 00 80 d2  mov x0, #4            // prctl(PR_SET_DUMPABLE, 0)
        01 00 80 d2  mov x1, #0
        e8 14 80 d2  mov x8, #167
        01 00 00 d4  svc #0
        80 02 00 b5  cbnz x0, .+80         // if that fails: exit
        20 02 80 d2  mov x0, #17           // rt_sigaction(SIGCHLD, data, NULL, 8)
        81 02 00 10  adr x1, .+80
        02 00 80 d2  mov x2, #0
        03 01 80 d2  mov x3, #8
        c8 10 80 d2  mov x8, #134
        01 00 00 d4  svc #0
        a0 01 00 b5  cbnz x0, .+52         // if that fails: exit
        20 00 80 d2  mov x0, #1            // write(1, data + 32, 1)
        a1 02 00 10  adr x1, .+84
        22 00 80 d2  mov x2, #1
        08 08 80 d2  mov x8, #64
        01 00 00 d4  svc #0
        00 00 80 d2  mov x0, #0            // read(0, stack, 64), until the input has ended
        e1 03 00 91  mov x1, sp
        02 08 80 d2  mov x2, #64
        e8 07 80 d2  mov x8, #63
        01 00 00 d4  svc #0
        1f 00 00 f1  cmp x0, #0
        4c ff ff 54  b.gt .-24
        a8 0b 80 d2  mov x8, #93           // exit
        01 00 00 d4  svc #0
    """,
    "x86_64": """
        bf 04 00 00 00        mov edi, 4            // prctl(PR_SET_DUMPABLE, 0)
        31 f6                 xor esi, esi
        b8 9d 00 00 00        mov eax, 157
        0f 05                 syscall
        85 c0                 test eax, eax
        75 49                 jne .+75              // if that fails: exit
        bf 11 00 00 00        mov edi, 17           // rt_sigaction(SIGCHLD, data, NULL, 8)
        48 8d 35 44 00 00 00  lea rsi, [rip+68]
        31 d2                 xor edx, edx
        41 ba 08 00 00 00     mov r10d, 8
        b8 0d 00 00 00        mov eax, 13
        0f 05                 syscall
        85 c0                 test eax, eax
        75 2a                 jne .+44              // if that fails: exit
        bf 01 00 00 00        mov edi, 1            // write(1, data + 32, 1)
        48 8d 35 45 00 00 00  lea rsi, [rip+69]
        ba 01 00 00 00        mov edx, 1
        b8 01 00 00 00        mov eax, 1
        0f 05                 syscall
        31 ff                 xor edi, edi          // read(0, stack, 64), until the input has ended
        48 89 e6              mov rsi, rsp
        ba 40 00 00 00        mov edx, 64
        31 c0                 xor eax, eax
        0f 05                 syscall
        85 c0                 test eax, eax
        7f ee                 jg .-16
        b8 3c 00 00 00        mov eax, 60           // exit
        0f 05                 syscall
    """,
}
"""Each instruction's bytes and its name, two spaces apart, by machine."""
DATA = struct.pack("<4Q", 1, 0, 0, 0) + b"\n"
"""What stands behind the instructions: the action SIG_IGN, and the line that is said."""
ELF_MACHINES = {"aarch64": 183, "x86_64": 62}
ADDRESS, ALIGNMENT = 0x400000, 0x10000  # of the largest pages that aarch64 has
HEADER, SEGMENT = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQQQ")
EXECUTABLE, LOADED, STACK, READ, WRITE, RUN = 2, 1, 0x6474E551, 4, 2, 1


def executable(machine: str | None = None) -> bytes:
    """Returns the program as an ELF file for a machine; None: this one. Raises KeyError for one that is not known."""
    machine = machine or platform.machine()
    begin = HEADER.size + 2 * SEGMENT.size
    whole = instructions(machine) + DATA
    size, entry = begin + len(whole), ADDRESS + begin
    identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")  # 64 bits, little endian
    sizes = (HEADER.size, SEGMENT.size, 2, 0, 0, 0)
    header = HEADER.pack(identity, EXECUTABLE, ELF_MACHINES[machine], 1, entry, HEADER.size, 0, 0, *sizes)
    loaded = SEGMENT.pack(LOADED, READ | RUN, 0, ADDRESS, ADDRESS, size, size, ALIGNMENT)
    stack = SEGMENT.pack(STACK, READ | WRITE, 0, 0, 0, 0, 0, 16)
    return header + loaded + stack + whole


def instructions(machine: str) -> bytes:
    lines = (line.strip() for line in PROGRAMS[machine].strip().splitlines())
    return b"".join(bytes.fromhex(line.split("  ")[0]) for line in lines)
