// SPDX-License-Identifier: Apache-2.0
// All that a program on Yoke needs; link yoke::yoke.
#pragma once

#include "yoke/base/error.h"
#include "yoke/base/rng.h"
#include "yoke/comm/communicator.h"
#include "yoke/comm/nccl/backend.h"
#include "yoke/comm/run_processes.h"
#include "yoke/comm/run_ranks.h"
#include "yoke/comm/run_world.h"
#include "yoke/comm/shm/backend.h"
#include "yoke/comm/stop_signal.h"
#include "yoke/comm/store.h"
#include "yoke/observe/log.h"
#include "yoke/observe/metrics.h"
#include "yoke/observe/trace.h"
#include "yoke/parallel/data_parallel.h"
#include "yoke/parallel/lr_schedule.h"
#include "yoke/parallel/optimizer.h"
#include "yoke/plan/layout.h"
#include "yoke/topo/device.h"
#include "yoke/topo/launch.h"
#include "yoke/topo/mesh.h"
