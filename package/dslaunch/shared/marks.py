"""Words by which one half finds what the other one wrote."""

NETWORK = "dslaunch network: "  # stands before the answer of rank 0 to `dslaunch check`
GPU = "dslaunch gpu: "  # stands before the answer of each rank to `dslaunch check`
SPAN = "dslaunch: "  # stands before the names of our ranges among torch's own in a trace
