"""The program that imports for the workers of its host, as text.

See [Note: How preloading works] in preload.py.
"""

from __future__ import annotations

from .worker_hook import ENTER, MILESTONES, STACKS

# The sitecustomize of the preloader.
SERVER = (
    STACKS
    + MILESTONES
    + ENTER
    + r'''
def _what_names_ranks():
    """A file that Python has run at its start, and the variable of a rank in it; or both empty."""
    import os, re, site, sys
    variable = re.compile(rb"(?<![A-Za-z])(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_)")
    library = os.path.dirname(os.__file__) + os.sep
    found = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) or ""
        is_own = path.startswith(library) and "-packages" not in path and "customize" not in name
        if path.endswith(".py") and path != __file__ and not is_own:
            found.append(path)
    folders = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    for folder in folders:
        try:
            found += [os.path.join(folder, one) for one in os.listdir(folder) if one.endswith(".pth")]
        except OSError:
            pass
    for path in found:
        try:
            with open(path, "rb") as file:
                text = file.read(1 << 20)
        except OSError:
            continue
        if path.endswith(".pth"):
            text = b"\n".join(one for one in text.splitlines() if one.startswith((b"import ", b"import\t")))
        match = variable.search(text)
        if match:
            return path, match[1].decode()
    return "", ""

def _num_threads():
    """Count the threads; that of jemalloc does no harm."""
    import os, time
    for _ in range(10):
        num_threads = 0
        for task in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{task}/comm") as file:
                    num_threads += file.read() != "jemalloc_bg_thd\n"
            except OSError:  # it has just ended
                pass
        if num_threads == 1:
            break
        time.sleep(0.01)  # one that has just begun has no name of its own yet
    return num_threads

def _has_opened_gpu():
    """Tell whether a device of a GPU's driver is open in this process: a fork would share it."""
    import os
    devices = ("/dev/nvidia", "/dev/kfd")
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(devices):
                return True
        except OSError:  # the one that the list was read with
            pass
    with open("/proc/self/maps") as file:
        return any(device in line for line in file for device in devices)

def _is_installed(name):
    """Tell whether a module is the standard library's, installed, or ours; not what a person works on."""
    import importlib.util, os, sys
    top = name.partition(".")[0]
    if top in ("dslaunch", "deepspeed") or top in sys.builtin_module_names:
        return True
    spec = importlib.util.find_spec(top)
    if spec is None:
        return False
    place = os.path.realpath(spec.origin or next(iter(spec.submodule_search_locations or ()), ""))
    library = os.path.realpath(os.path.dirname(os.__file__)) + os.sep
    if spec.origin in ("built-in", "frozen") or f"{os.sep}site-packages{os.sep}" in place:
        return True
    return place.startswith(library) or f"{os.sep}dist-packages{os.sep}" in place

def _begin_to_look(later):
    """Return a function that tells why the workers could not share what was imported since its last call.
    It ends with `end()`. Until then this process is nice, if it may take that back.
    """
    import os
    asked, get = [], os._Environ.__getitem__
    def get_and_note(self, key):
        name = os.fsdecode(key)
        if name in later:
            asked.append(name)
        return get(self, key)
    os._Environ.__getitem__ = get_and_note
    before = os.getpriority(os.PRIO_PROCESS, 0)
    on_trial = os.fork()
    if on_trial == 0:
        try:
            os.nice(1)
            os.setpriority(os.PRIO_PROCESS, 0, before)
        except OSError:
            os._exit(1)
        os._exit(0)
    is_nice = os.waitpid(on_trial, 0)[1] == 0
    if is_nice:
        os.nice(5)
    def look():
        if asked:
            return f"asks for {asked[0]}, which a worker gets later"
        if len(os.listdir("/proc/self/task")) > 1:
            for_nothing = os.fork()  # which ends the threads of some libraries
            if for_nothing == 0:
                os._exit(0)
            os.waitpid(for_nothing, 0)
            if _num_threads() > 1:
                return "starts threads, which a fork would lose"
        return "opens a GPU, which a fork cannot use" if _has_opened_gpu() else ""
    def end():
        os._Environ.__getitem__ = get
        if is_nice:
            os.setpriority(os.PRIO_PROCESS, 0, before)
    look.end = end
    return look

def _serve(link):
    """Import, then fork for each request; returns only in a worker, which is to run its program."""
    import array, ctypes, gc, importlib, json, os, socket, struct, sys, time
    def receive():
        size = socket.CMSG_SPACE(2 * array.array("i").itemsize)
        data, extra, _, _ = link.recvmsg(4, size)
        fds = array.array("i")
        for _, _, one in extra:
            fds.frombytes(one[: len(one) - len(one) % fds.itemsize])
        while data and (len(data) < 4 or len(data) < 4 + struct.unpack(">I", data[:4])[0]):
            more = link.recv(1 << 16)
            data = data + more if more else b""
        return (json.loads(data[4:]) if data else None), list(fds)
    def answer(**words):
        body = json.dumps(words).encode()
        link.sendall(struct.pack(">I", len(body)) + body)
    def encoded(text):
        return text.encode("utf-8", "surrogateescape")
    with open("/proc/self/environ", "rb") as file:
        given = {item.partition(b"=")[0] for item in file.read().split(b"\0")}
    added = {name: value for name, value in os.environb.items() if name not in given}  # by Python: LC_CTYPE
    def refuse(why, **more):
        answer(why_not=why, **more)
        os._exit(1)
    path, variable = _what_names_ranks()
    if path:
        refuse(f"Python runs {path} at its start, and that names {variable}, which a worker gets later")
    job, _ = receive()
    if job["watched"]:
        _watch_milestones(job["watched"])
    folder = os.getcwdb()
    if job["script"] is not None:
        script = encoded(job["script"])
        is_archive = os.path.isdir(script)
        if not is_archive and os.path.isfile(script):
            with open(script, "rb") as file:
                is_archive = file.read(4) == b"PK\3\4"
        folder = script if is_archive else os.path.dirname(os.path.realpath(script))
    before = [] if getattr(sys.flags, "safe_path", False) else [os.fsdecode(folder)]
    sys.path[:0] = before  # where Python puts it before it runs a script
    gc.disable()  # what is imported stays: to search it for garbage takes a fifth of the time
    look = None if job["later"] is None else _begin_to_look(job["later"])
    num_fit = 0
    try:
        for name, *wanted in job["lines"]:
            if look is not None and not _is_installed(name):
                break
            if name.startswith("dslaunch.runtime.") and "dslaunch.runtime" not in sys.modules:
                continue  # the program's `deepspeed` is not ours
            module = importlib.import_module(name)
            for one in wanted:
                if one != "*" and not hasattr(module, one):
                    importlib.import_module(f"{name}.{one}")
            why = look() if look is not None else ""
            if why:
                refuse(f"importing {name} {why}", num_fit=num_fit)
            num_fit += 1
    except BaseException as error:
        answer(problem=f"{type(error).__name__}: {error}")
        os._exit(1)
    gc.freeze()
    gc.enable()
    if look is not None:
        look.end()
    if sys.path[: len(before)] != before:
        refuse("importing puts another folder in front of sys.path, where the script's will stand")
    del sys.path[: len(before)]
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    for_nothing = os.fork()
    if for_nothing == 0:
        os._exit(cuda is not None and cuda._is_in_bad_fork())
    has_cuda = os.waitpid(for_nothing, 0)[1] != 0 or (cuda is not None and cuda.is_initialized())
    has_cuda = has_cuda or _has_opened_gpu()
    answer(why_not="", num_threads=_num_threads(), has_cuda=has_cuda, num_fit=num_fit)
    while True:
        request, fds = receive()
        if request is None:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for fd in fds:
                os.close(fd)
            continue
        parent = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == parent:
            os.sched_yield()
        if os.getppid() != request["agent"]:
            os._exit(1)
        os.setsid()
        libc = ctypes.CDLL(None)
        libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
        if os.getppid() != request["agent"]:
            os._exit(1)
        os.chdir(encoded(request["cwd"]))  # it may be another folder of that name by now
        if request["cores"] is not None:
            os.sched_setaffinity(0, request["cores"])
        null = os.open(os.devnull, os.O_RDONLY)
        for place, fd in enumerate((null, *fds)):
            os.dup2(fd, place)
            os.close(fd)
        words = [encoded(one) for one in request["argv"]]
        with open("/proc/self/stat", "rb") as file:
            begin, end = (int(one) for one in file.read().rpartition(b")")[2].split()[45:47])
        line = (b"\0".join(words) + b"\0")[: end - begin]
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, line, len(line))
        # PR_SET_MM, ARG_END; root only, else zeros follow
        libc.prctl(35, 9, ctypes.c_ulong(begin + len(line)), 0, 0)
        env = {encoded(name): encoded(value) for name, value in request["env"]}
        env.update(added)
        stacks = env.pop(b"DSLAUNCH_STACKS", b"")
        for name in set(os.environb) - set(env):
            del os.environb[name]
        os.environb.update(env)
        answer(pid=os.getpid())
        link.close()
        if stacks:
            _register_stacks(os.fsdecode(stacks))
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        torch_random = getattr(sys.modules.get("torch"), "default_generator", None)
        if torch_random is not None and torch_random.initial_seed() >= 1 << 32:
            torch_random.seed()
        if "threading" in sys.modules:  # before Python 3.13 it keeps the number of the process forked from
            sys.modules["threading"].main_thread()._set_native_id()
        sys.orig_argv[:] = [os.fsdecode(one) for one in words]
        num_left = request["num_arguments"] - 1
        sys.argv[1:] = [os.fsdecode(one) for one in words[len(words) - num_left :]]
        return

def _begin():
    import os, site, socket
    link, *printed = (int(one) for one in os.environ.pop("DSLAUNCH_PRELOAD").split())
    if not printed:
        os.write(link, b"1")
        os._exit(0)
    for place in (1, 2):  # what Python has made of them knows only that it cannot seek in a pipe
        os.dup2(printed[0], place)
    os.close(printed[0])
    _leave_the_paths()
    failure = None
    try:
        _run_hidden()
    except Exception as error:
        failure = error
    if site.ENABLE_USER_SITE:
        site.execusercustomize()
    _serve(socket.socket(fileno=link))
    if failure is not None:
        raise failure  # for site, which says what it is
_begin()
'''
)
