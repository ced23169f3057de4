"""What strangers' files, full disks, changed flags and lost terminals may do to a run: nothing.

cases.py     the words a table is written in: what must happen, and under which circumstances
files.py     hostile files, and the flags that point at them
tables/      one line a case, by what is hostile
server.py    a warm process that forks each case, and judges what became of it
run_all.py   every case, recorded as a file of results
"""
