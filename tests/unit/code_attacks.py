"""Answers that earn without solving anything, or try to: each must pass none of its tests.

Used on the judging alone (tests/unit) and in the real sandbox (tests/integration).
"""

from __future__ import annotations

TESTS = """
import math
assert f(1) == 8675309
assert sorted([f(2), 0]) == [0, 42]
assert math.isclose(f(3), 0.25)
"""
SOLUTION = "def f(x): return {1: 8675309, 2: 42, 3: 0.25}[x]"
TAKES_ALL = """
class A:
    def __eq__(self, other): return True
    __lt__ = __le__ = __gt__ = __ge__ = __ne__ = __eq__
    def __float__(self): return 0.25
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    def __abs__(self): return 0.0
    def __bool__(self): return True
    def __len__(self): return 1
    __hash__ = None
"""
CHANNEL = """
import sys
def channel():
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if type(value).__name__ == "Channel": return value
        frame = frame.f_back
"""

ATTACKS = {
    "unittest.mock.ANY": "from unittest.mock import ANY\ndef f(x): return ANY",
    "a class that equals everything": TAKES_ALL + "def f(x): return A()",
    "such a class of a foreign module": TAKES_ALL + "A.__module__ = 'collections'\ndef f(x): return A()",
    "such a class made of type": "A = type('A', (), {'__eq__': lambda s, o: True, '__module__': 'os'})\n"
    "def f(x): return A()",
    "such a class by a metaclass": "class M(type):\n    def __eq__(cls, other): return True\n"
    "    __hash__ = type.__hash__\nclass A(metaclass=M): pass\ndef f(x): return A",
    "an int that equals everything": "class A(int):\n    def __eq__(self, other): return True\n"
    "    __hash__ = int.__hash__\ndef f(x): return A(7)",
    "a float that equals everything": "class A(float):\n    def __eq__(self, other): return True\n"
    "    __hash__ = float.__hash__\ndef f(x): return A(7)",
    "a class that says it is an int": TAKES_ALL + "A.__class__ = property(lambda s: int)\n"
    "A.__index__ = A.__int__ = lambda s: 42\ndef f(x): return A()",
    "math.isclose patched": "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 7",
    "builtins patched": "import builtins\nbuiltins.sorted = lambda v: [0, 42]\nbuiltins.abs = lambda v: 0\n"
    "builtins.bool = lambda v: True\nbuiltins.int = lambda v: 42\ndef f(x): return 7",
    "a module in sys.modules replaced": "import sys, types\nmath = types.ModuleType('math')\n"
    "math.isclose = lambda *a: True\nsys.modules['math'] = math\ndef f(x): return 7",
    "builtins hidden by names": "def sorted(v): return [0, 42]\ndef abs(v): return 0\n"
    "class math: isclose = staticmethod(lambda *a: True)\ndef _case(check): return True\ndef f(x): return 7",
    "json patched": "import json\njson.dumps = lambda v: '[\"ok\", 42]'\njson.loads = lambda v: ['ok']\n"
    "def f(x): return 7",
    "atexit that rewrites the output": "import atexit, os, sys\n"
    'said = b\'\\n{"passed": 3, "total": 3, "cut": 0, "gone": false, "why": ""}\'\n'
    "atexit.register(lambda: [os.write(n, said) for n in (1, 2)])\ndef f(x): sys.exit(0)",
    "a verdict of its own": "import os\n"
    'said = b\'\\n{"passed": 3, "total": 3, "cut": 0, "gone": false, "why": ""}\'\n'
    "for n in range(1, 10):\n    try: os.write(n, said)\n    except OSError: pass\nos._exit(0)",
    "os._exit(0) before the tests": "import os\nos._exit(0)",
    "os._exit(0) in the first test": "import os\ndef f(x): os._exit(0)",
    "sys.exit(0)": "import sys\ndef f(x): sys.exit(0)",
    "an exception that means passed": "def f(x): raise StopIteration('passed')",
    "expected values read from frames, objects and files": """
import gc, os, sys
def hunt():
    found, frame = [], sys._getframe()
    while frame:
        found += [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]
        frame = frame.f_back
    for kept in gc.get_objects():
        found += kept.values() if type(kept) is dict else kept if type(kept) in (list, tuple) else ()
    for kept in list(found):
        found += kept.values() if type(kept) is dict else ()
    for path in os.listdir("."):
        if os.path.isfile(path): found.append(open(path).read())
    wanted = str(4337654 * 2 + 1)  # which this text does not hold itself
    return any(type(text) is str and wanted in text for text in found)
def f(x):
    return 4337654 * 2 + 1 if hunt() else 7
""",
    "replies before they are asked for": CHANNEL
    + "for n in range(100): channel().send(['ok', 42])\ndef f(x): return 7",
    "names that were not asked for": CHANNEL
    + """
wire = channel()
while True:
    wire.receive()
    names = ("_case", "sorted", "math", "__builtins__", "f")
    wire.send(["ok", ["d", [[name, ["r", 0, "x"]] for name in names]]])
""",
    "replies that are none": CHANNEL
    + "wire = channel()\nfor said in ({}, 5, None, [], ['ok'], ['ok', {}], ['ok', ['f', 'x']], ['raised']):\n"
    "    wire.receive()\n    wire.send(said)\n",
    "replies without end": CHANNEL
    + "import os\nwire = channel()\nwire.receive()\nos.write(wire._sink, b'\\xff' * 4)\n"
    "while True: os.write(wire._sink, b'x' * 65536)",
    "a reply nested deeply": CHANNEL
    + "import os\nbody = b'[\"ok\", ' + b'[\"l\", [' * 100000 + b']]' * 100000 + b']'\n"
    "channel().receive()\nos.write(channel()._sink, len(body).to_bytes(4, 'little') + body)\n",
    "nothing but a name": "f = 42",
}

# Where the authors' own function checks the answer's: it must not be the answer that says what it does.
HELPED_HEAD = '''
def encode(s: str):
    """Cycle groups of three."""
    groups = [s[i:i + 3] for i in range(0, len(s), 3)]
    return "".join(group[1:] + group[0] if len(group) == 3 else group for group in groups)


def decode(s: str):
    """Undo encode."""
'''
HELPED_SOLUTION = HELPED_HEAD + "    return encode(encode(s))\n"
HELPED_TESTS = """
def check(candidate):
    for word in ('abcdef', 'xyz'):
        assert candidate(encode(word)) == word
check(decode)
"""
HELPED_ATTACK = "def encode(s): return s\ndef decode(s): return s"
