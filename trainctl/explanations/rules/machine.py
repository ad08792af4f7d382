"""Rules of this machine, launchers and hosts: TC120 to TC137, TC160 to TC197, TC305, TC372, 373,
460.
"""

from __future__ import annotations

from trainctl.explanations.entry import RuleText

ENTRIES: dict[str, RuleText] = {
    "TC120": RuleText(
        "The recipe is for GPUs, and torch sees none: no driver, a build of torch without CUDA, "
        "or a variable that hides them.",
        "Launch it where the devices are; `nvidia-smi` and `trainctl doctor` show what is missing.",
        title="The plan is for another kind of device than this machine has.",
        situation="`trainctl launch recipe=7b-zero3 hardware=8xh100-80g` on a machine without GPUs",
        message="the plan is for 8xh100-80g, and this machine has no CUDA device that its "
        "processes can see",
    ),
    "TC121": RuleText(
        "Every rank has a device of its own.",
        "hardware.devices_per_node as many as there are, or hardware=auto.",
        title="The plan is for more devices than this machine has.",
        situation="A plan for 8 GPUs on a machine with 4",
        message="the plan is for 8 devices of a node, and this machine shows 4 devices",
    ),
    "TC122": RuleText(
        "The budget was made for larger devices: what fits there may not fit here.",
        "hardware=auto, or the option for this card.",
        title="The plan is for devices with more memory than this machine's.",
        situation="`hardware=8xh100-80g` on cards of 40 GB",
        message="the plan is for devices of 79.6 GiB, and this machine has NVIDIA A100 with 39.4 "
        "GiB",
    ),
    "TC123": RuleText(
        "Each process computes with threads; more processes than cores take turns.",
        "hardware=NxCPU with N cores.",
        title="More processes than cores.",
        situation="`hardware=8xcpu` on a machine with 2 cores",
        message="8 processes will share 2 cores of this machine: this will be slow",
    ),
    "TC124": RuleText(
        "A package that the plan, or a package of the plan, imports is missing or of another "
        "version.",
        "The pip command in the hint.",
        title="A package that is not installed.",
        situation="`logging.to=[tensorboard]` without the extra",
        message="transformers 5.23.0 needs tokenizers <=0.23.3,>=0.22.0",
    ),
    "TC125": RuleText(
        "torch was built without this kind of device, or for a CUDA that the driver is too old "
        "for; the first use of a device would fail.",
        "torch's build for your driver.",
        title="Versions of packages that do not go together.",
        situation="torch for CUDA 13 on a driver for CUDA 12.4",
        message="torch 2.13.0 is for CUDA 13.0, and the driver supports CUDA 12.4",
    ),
    "TC126": RuleText(
        "DeepSpeed compiles some kernels at their first use: CPU Adam for offload, async_io for "
        "NVMe.",
        "apt install g++ ninja-build python3-dev, or a module of the cluster.",
        title="An op has to be compiled, and a tool for it is missing.",
        situation="offload=cpu on a machine without a compiler",
        message="DeepSpeed has to compile cpu_adam, and there is no C++ compiler here",
    ),
    "TC127": RuleText(
        "Reading and writing NVMe past the page cache goes through libaio.",
        "apt install libaio-dev.",
        title="libaio is missing, and async_io needs it.",
        situation="offload to NVMe on a machine without libaio's header",
        message="DeepSpeed's async_io needs libaio, and a program that uses it does not compile "
        "here",
    ),
    "TC128": RuleText(
        "Kernels for GPUs are compiled by nvcc, of the major version that torch was built with.",
        "Install that toolkit, and set CUDA_HOME.",
        title="The CUDA toolkit is missing, or not of torch's version.",
        situation="A plan with a fused kernel, with nvcc 11.8 and torch for CUDA 12.8",
        message="DeepSpeed has to compile fused_adam; the CUDA toolkit here is 11.8, and torch was "
        "built for 12.8",
    ),
    "TC129": RuleText(
        "NCCL, gloo and data loaders of one machine exchange data through /dev/shm; containers "
        "give it 64 MB. A process that finds it full dies of SIGBUS.",
        "docker run --shm-size=8g or --ipc=host; in Kubernetes launcher.kubernetes_shared_memory.",
        title="/dev/shm is missing or too small.",
        situation="8 ranks in a container with the default /dev/shm",
        message="/dev/shm has 64 of 64 MiB free; 8 processes may need 512, and die of SIGBUS "
        "without",
    ),
    "TC130": RuleText(
        "InfiniBand cards and NVMe transfer need memory that is locked in place.",
        "ulimit -l unlimited, in limits.conf or in the scheduler's own setting.",
        title="Too little memory can be locked (`ulimit -l`).",
        situation="offload to NVMe with `ulimit -l 64`",
        message="at most 0.1 MiB of memory can be locked (ulimit -l); pinning memory may fail or "
        "be slow",
    ),
    "TC131": RuleText(
        "The budget was made for the machine, and a control group (a container, a job) allows "
        "less. The kernel kills a process that goes beyond.",
        "More memory for the job, or hardware.host_memory_bytes as it is.",
        title="The container or machine allows less host memory than the plan is for.",
        situation="A job with `--mem=64G` for a plan of 2 TB",
        message="the plan is for 1,800 GiB of host memory, and this machine has 64 GiB of memory "
        "for it (its own, or the control group's)",
    ),
    "TC132": RuleText(
        "A block is written and read back past the page cache, as DeepSpeed does it. A network "
        "drive or tmpfs does not do that, or is slower than no offload.",
        "A folder on a local NVMe drive that you may write to.",
        title="The folder for NVMe is missing, does not work, or is not on a local drive.",
        situation="`offload.nvme_path=/local_nvme` on a machine without that folder",
        message="/local_nvme does not exist",
    ),
    "TC133": RuleText(
        "CUDA reads CUDA_VISIBLE_DEVICES up to the first entry that names nothing, and says "
        "nothing.",
        "Unset it, or name devices that `nvidia-smi -L` lists.",
        title="A variable shows other devices than the plan is for.",
        situation="`CUDA_VISIBLE_DEVICES=0,9` for a plan of two devices",
        message="CUDA_VISIBLE_DEVICES=0,9 names 9, which is not here: it and all after it are "
        "ignored",
    ),
    "TC134": RuleText(
        "The declared hardware computes in a format that a device here does not: an older card "
        "beside newer ones, mostly.",
        "The other precision, or hide the device.",
        title="A device that does not compute in the plan's format.",
        situation="precision=bf16 on a T4",
        message="Tesla T4 (device 0) does not compute in bf16",
    ),
    "TC135": RuleText(
        "gloo takes the address of the host's own name, which is often the loopback device's: "
        "other nodes then wait for it until a timeout.",
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME as launcher.environment, or mend /etc/hosts.",
        title="A network interface that is not there or not up.",
        situation="`launcher.environment.NCCL_SOCKET_IFNAME=eth9`",
        message="NCCL_SOCKET_IFNAME=eth9, and no interface of this machine that is up is called "
        "eth9",
    ),
    "TC136": RuleText(
        "The kernel that was asked for is another package's, or is compiled by Triton.",
        "Install it, or take the option that the hint names.",
        title="A package or compiler that a kernel of the plan needs is missing.",
        situation="`kernels.liger=true` without liger-kernel",
        message="kernels.liger=True needs liger-kernel, which is not installed here",
    ),
    "TC137": RuleText(
        "A build that was killed leaves its lock file, and torch waits for it without end and "
        "without a word: a run that hangs before its first step.",
        "The rm command in the hint.",
        title="The lock of a killed build, which would hold up the run for ever.",
        situation="After a build of an operator that was interrupted",
        message="a build of DeepSpeed's cpu_adam was killed; its lock would hold up this run for "
        "ever",
    ),
    "TC372": RuleText(
        "torch multiplies bf16 and fp16 matrices by the processor's own instructions (AVX-512, "
        "AMX), and where it has none, number by number: 1.3 instead of 40 GFLOP/s, measured. "
        "trainctl's own trainer multiplies in fp32 there and rounds; other programs do not.",
        "precision=fp32, which needs twice the memory, or patience, if it is bf16 that is tried.",
        title="A number format that this machine's processor has no instructions for.",
        situation="script=train.py precision=bf16 on a laptop without AVX-512",
        message="this machine's processor has no instructions for bf16: in a program of your own "
        "matrix products take some thirty times as long as in fp32",
    ),
    "TC373": RuleText(
        "torch, transformers and DeepSpeed are a million lines, which Python compiles when it "
        "imports them, and keeps. Where it may not keep them, as in an image that was built "
        "without bytecode, each rank first compiles for 15 s: three quarters of its start.",
        "Unset PYTHONDONTWRITEBYTECODE, or compile the packages once, when the image is built: "
        "python -m compileall -q SITE-PACKAGES.",
        title="Packages that every process compiles anew.",
        situation="In a container whose image has no bytecode, with PYTHONDONTWRITEBYTECODE set",
        message="torch is not compiled, and PYTHONDONTWRITEBYTECODE is set: each process compiles "
        "what it imports anew",
    ),
    "TC460": RuleText(
        "Tokenized text and traces are read from the cache, and operators that torch has built are "
        "loaded from it as code. Under sudo HOME may still be another user's: whoever owns that "
        "folder can change all of it, and cannot remove what root has written there.",
        "Start as that user; or give root a folder of its own: sudo -H, or XDG_CACHE_HOME, "
        "TRAINCTL_CACHE_DIR and TORCH_EXTENSIONS_DIR.",
        title="A cache of root's in another user's folder.",
        situation="`sudo trainctl launch recipe=tiny` where sudo keeps HOME",
        message="root keeps caches in /home/ada/.cache/trainctl, and /home/ada/.cache belongs to "
        "user ada, who can change what root trains on and loads",
    ),
    "TC160": RuleText(
        "The value becomes an option of sbatch, srun or mpirun. One with a space or a leading "
        "dash would be read as something else there.",
        "A plain word; further options go into launcher.slurm_options or mpi_options.",
        "recipe=tiny launcher=slurm 'launcher.slurm_partition=gpu --exclusive'",
        title="A word of a scheduler's option that is not plain.",
    ),
    "TC161": RuleText(
        "A path with a line feed or another control character cannot stand in a job script.",
        "Another directory with --run-dir.",
        title="A path that a scheduler's script could not carry.",
        situation="`trainctl launch launcher=slurm --run-dir` with a path that has a line feed",
        message="the run directory's path has control characters: 'runs/a\\nb'",
    ),
    "TC162": RuleText(
        "mpirun is started here, and is not on PATH.",
        "Install Open MPI or MPICH, load its module, or launcher.mpi_program=PATH.",
        title="mpirun, or the program that launcher.mpi_* names, is missing.",
        situation="`launcher=mpi` where no MPI is installed",
        message="there is no program 'mpirun' on this machine",
    ),
    "TC163": RuleText(
        "One agent is started on each node, on the hosts of the file in their order.",
        "More hosts in the file, or hardware of fewer nodes.",
        "recipe=tiny hardware=2x2xcpu launcher=mpi launcher.mpi_hostfile=hosts",
        title="Fewer hosts in the MPI hostfile than the plan has nodes.",
        files={"hosts": "node1\n"},
    ),
    "TC164": RuleText(
        "Pods are made of an image, which must have trainctl and what the plan needs.",
        "launcher.kubernetes_image=NAME:TAG.",
        "recipe=tiny launcher=kubernetes",
        title="Kubernetes without an image.",
    ),
    "TC165": RuleText(
        "Pods and the machine that you launch from see the run directory under one path, through "
        "a volume.",
        "launcher.kubernetes_claims={CLAIM: /path}, and --run-dir beneath it.",
        title="A run directory that no volume of the pods holds.",
        situation="`launcher=kubernetes` with `--run-dir` outside every claim",
        message="no volume claim is mounted where the run is: /home/me/runs/mine",
    ),
    "TC166": RuleText(
        "Kubernetes names are lower-case letters, digits, dashes and dots.",
        "Another name.",
        "recipe=tiny launcher=kubernetes launcher.kubernetes_image=a:1 "
        "launcher.kubernetes_namespace=My_Team",
        title="A name that Kubernetes does not take.",
    ),
    "TC167": RuleText(
        "Everything of the configuration is written with the run. A key or token there would be "
        "read by whoever reads the run.",
        "A reference: launcher.environment.HF_TOKEN='${oc.env:HF_TOKEN}', resolved at the start.",
        "recipe=tiny launcher.environment.HF_TOKEN=hf_0123456789abcdef0123456789",
        title="A value that may be a secret, and that the run would write.",
    ),
    "TC077": RuleText(
        "A local launch starts processes on this machine alone. For more nodes something has to "
        "start an agent on each: ssh, a scheduler, mpirun or Kubernetes.",
        "launcher=slurm, ssh, mpi or kubernetes; or hardware of one node.",
        "recipe=tiny hardware=2x8xh100-80g",
        title="More nodes than the launcher starts; commands that only plan do not ask.",
    ),
    "TC168": RuleText(
        "The configuration refers to a variable of the shell, which the start would not find.",
        "export it.",
        "recipe=tiny 'launcher.environment.HF_TOKEN=${oc.env:NO_SUCH_VARIABLE}'",
        title="A variable that the configuration refers to, and that a start would not find.",
    ),
    "TC169": RuleText(
        "A host named twice would have two agents that share its devices; a file that cannot be "
        "read would start the run on this machine alone.",
        "Each host once; hardware.devices_per_node says how many devices it has.",
        "recipe=tiny hardware=2x2xcpu launcher=ssh 'launcher.hosts=[a,a]'",
        title="Hosts that come twice, or a file of hosts that ssh's launcher cannot use.",
    ),
    "TC180": RuleText(
        "The machine is off, its name does not resolve, a firewall drops the port, or it is very "
        "slow.",
        "`ssh HOST true` must work; launcher.exclude=HOST leaves it out, "
        "launcher.preflight_seconds gives more time.",
        title="A host that cannot be reached, or does not answer in time.",
        situation="`launcher=ssh` with a host that is off",
        message="node2 cannot be reached (ssh: connect to host node2 port 22: No route to host)",
    ),
    "TC181": RuleText(
        "The key is another than the one that ssh remembers: a machine that was installed anew, "
        "or one that stands in for it.",
        "Make sure which; then `ssh-keygen -R HOST` and log in once by hand.",
        title="A host whose key is not the one that ssh knows.",
        situation="`launcher=ssh` after a host was installed anew",
        message="its host key is not the one that ssh knows",
    ),
    "TC182": RuleText(
        "Nobody is there to type a password into every connection.",
        "`ssh-copy-id HOST`, or the key in ~/.ssh/config.",
        title="A host that asks for a password.",
        situation="`launcher=ssh` with a host that does not know your key",
        message="ssh may not log in without a password",
    ),
    "TC183": RuleText(
        "The same Python at the same path is started there, and it is not there, or has no "
        "trainctl.",
        "The environment at the same path, or launcher.python.",
        title="A host where trainctl cannot be started.",
        situation="`launcher=ssh` with an environment that only this machine has",
        message="trainctl cannot be started there",
    ),
    "TC184": RuleText(
        "Ranks with other versions of torch or DeepSpeed may fail in a collective, hang, or "
        "compute another loss.",
        "One environment on shared storage, or the same versions everywhere.",
        title="A host with other versions of packages.",
        situation="Hosts that were installed at different times",
        message="node2 has deepspeed 0.19.7, and this machine 0.19.8",
    ),
    "TC185": RuleText(
        "The version is the same and the files differ: a checkout that was edited on one machine.",
        "Copy the changed files, or share one environment.",
        title="A host with another code of trainctl.",
        situation="A checkout that was changed on one machine only",
        message="node2 has another code of trainctl (3f2a91) than this machine (77b0cd), under the "
        "same version",
    ),
    "TC186": RuleText(
        "Every node gives the same devices and memory to the plan.",
        "The hardware that all have, or leave the host out.",
        title="A host with other devices, cores or memory than the plan is for.",
        situation="A plan for nodes of 8 GPUs, and one has 4",
        message="the plan is for 8 devices of a node, and node2 shows 4 devices",
    ),
    "TC187": RuleText(
        "Checkpoints, records and logs of all nodes are in one directory. Each host looks for "
        "what the others wrote.",
        "--run-dir on storage that all mount at one path.",
        title="A host that does not share the run's storage.",
        situation="`--run-dir` on a local disk",
        message="node2 does not see what node1 wrote where the run is kept",
    ),
    "TC188": RuleText(
        "Seen from that host, the storage has no room for one checkpoint.",
        "Free space, or another --run-dir.",
        title="A host with too little disk for a checkpoint.",
        situation="A full disk on a host",
        message="a checkpoint takes 75.3 GiB, and the folder of the run, as node2 sees it, has "
        "12.0 GiB free",
    ),
    "TC189": RuleText(
        "The ranks find each other at a port of the first host, and another process has it.",
        "launcher.port=null, which takes a free one.",
        title="A port that cannot be used on a host.",
        situation="launcher.port=22",
        message="port 22 on node1 cannot be used: Permission denied",
    ),
    "TC190": RuleText(
        "Times in records, leases and timeouts are compared between hosts.",
        "chrony or ntpd on all.",
        title="Hosts whose clocks differ.",
        situation="A host without a time server",
        message="the clock of node2 is 42 s ahead of that of node1",
    ),
    "TC191": RuleText(
        "The interface that was named is not on that host, or nothing can listen there.",
        "`ssh HOST ip -brief address` lists them; launcher.interfaces names one for each host.",
        title="A host without the network interface, or whose interface does not listen.",
        situation="launcher.interface=ib0 on a host that has ib1",
        message="node2 cannot listen on 10.0.0.2 (ib0)",
    ),
    "TC192": RuleText(
        "Every pair of hosts is tried over the chosen interfaces; these two do not hear each "
        "other.",
        "Interfaces of one network, or open the firewall between the hosts.",
        title="Hosts that cannot reach each other.",
        situation="Two hosts with interfaces of different networks",
        message="node1 by ib0 (10.0.0.1) does not reach node2",
    ),
    "TC193": RuleText(
        "A variable such as NCCL_* changes what ranks do, and ranks on other hosts would not have "
        "it.",
        "Add it to launcher.forward_environment.",
        title="A variable that is set here and not forwarded to the hosts.",
        situation="`NCCL_ALGO=Ring trainctl launch launcher=ssh ...`",
        message="NCCL_ALGO is set here, and ranks on other hosts do not get it",
    ),
    "TC194": RuleText(
        "Your script, or a module that it imports, is missing there or has other contents.",
        "Copy it to the same path, or keep it on shared storage.",
        title="A host without the files of the user's code, or with other versions of them.",
        situation="`script=train.py` in a folder that only this machine has",
        message="node2 does not have train.py",
    ),
    "TC196": RuleText(
        "The first save would fail, hours later.",
        "Free space, or --run-dir on another disk; checkpoint.keep_last keeps fewer.",
        title="A disk without space for a checkpoint.",
        situation="A 7B run on a disk with 20 GiB free",
        message="a checkpoint takes 75.3 GiB, and runs has 20.1 GiB free",
    ),
    "TC197": RuleText(
        "The job is handed over by a program of the scheduler, which this machine does not have.",
        "Repeat the command on a login node.",
        title="sbatch, srun or kubectl is missing where a run is handed over.",
        situation="`launcher=slurm` on a laptop",
        message="sbatch is not installed on this machine",
    ),
    "TC200": RuleText(
        "Not JSON, and not Hjson either: DeepSpeed fails at the start with a traceback.",
        "The line that the message names.",
        title="A DeepSpeed JSON that is no JSON.",
        example="--deepspeed ds.json --world-size 8",
        files={"ds.json": '{"train_batch_size": 8'},
    ),
    "TC201": RuleText(
        "Which of the two holds depends on the reader; DeepSpeed refuses such a file.",
        "Keep one.",
        title="A key that a DeepSpeed JSON gives twice; DeepSpeed refuses it.",
        example="--deepspeed ds.json --world-size 8",
        files={"ds.json": '{"train_batch_size": 8, "train_batch_size": 16}'},
    ),
    "TC202": RuleText(
        "DeepSpeed reads Hjson, where this is allowed; accelerate, transformers and editors read "
        "JSON.",
        "Remove comments and the last comma.",
        title="A comment, or a comma too many: DeepSpeed reads Hjson, others read JSON.",
        example="--deepspeed ds.json --world-size 8",
        files={"ds.json": '{"train_batch_size": 8,}'},
    ),
    "TC305": RuleText(
        "Some of what trainctl does needs parts of other packages that they do not document. Each "
        "is declared with the version that was read; another definition may do something else.",
        "The pip command in the hint: the version that was read last.",
        title="A definition in another package is not the one that trainctl was written for.",
        situation="A newer DeepSpeed than was read",
        message="deepspeed.runtime.engine.DeepSpeedEngine._take_model_step of deepspeed 0.20.0 is "
        "not there; it is called by trainctl, which was written for deepspeed 0.19.8",
    ),
}
