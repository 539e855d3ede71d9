"""A directory of another user's, whose files have the names of what fenka's commands import, load and run."""

from typing import Final

RAN: Final = "/tmp/foreign-code-ran"

MAKE: Final = rf"""
mkdir /tmp/foreign && cd /tmp/foreign
for name in fenka sitecustomize usercustomize ctypes json asyncio socket; do
  echo "open('{RAN}', 'a').write(__name__)" > $name.py
done
for name in encodings yaml numpy click; do mkdir $name; cp fenka.py $name/__init__.py; done
for name in libcuda.so.1 libnvidia-ml.so.1 libfenka.so libc.so.6; do echo broken > $name; done
for name in python3 busctl kubectl mount nsenter nvidia-smi sh unshare; do
  printf '#!/bin/bash\necho $0 >> {RAN}\n' > $name
  chmod 755 $name
done
printf 'PYTHONHOME=/tmp/foreign\nPYTHONPATH=/tmp/foreign\nLD_PRELOAD=/tmp/foreign/libcuda.so.1\n' > .env
printf 'home = /tmp/foreign\n' > pyvenv.cfg
printf 'simulate = "A100"\n' > daemon.toml
cp daemon.toml fenka.toml
cd
"""
"""Makes the directory."""

PROGRAM: Final = (
    "import ctypes as c; d = c.CDLL('libcuda.so.1'); d.cuInit(0); x = c.c_void_p(); "
    "d.cuDevicePrimaryCtxRetain(c.byref(x), 0); d.cuCtxSetCurrent(x); n = c.c_size_t(); "
    "d.cuMemGetInfo_v2(c.byref(c.c_size_t()), c.byref(n)); print(n.value >> 20, 'MiB')"
)

USE: Final = f"""
set -e
cd /tmp/foreign
fenka run --gpu-mem 4 -- python3 -P -c "{PROGRAM}"
fenka run --gpu-mem 4 --name first -d -- sleep 60
fenka ps
fenka why first
fenka top node -s
fenka queue
fenka doctor || true
fenka stop first
fenka logs first
cat {RAN} 2>/dev/null || echo 'no foreign code ran'
python3 -c 'import json' || true
grep json {RAN}
"""
"""Uses fenka there, and prints what code of the directory's has run. In the end Python itself runs some."""
