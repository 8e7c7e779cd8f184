// What users of the library need: their own models and loops, on ranks, trained, saved and proved. Beside it, by
// themselves: video_data.hpp, video_dit.hpp, flow_matching.hpp (videos), balance_loss.hpp (experts), hosts.hpp
// (several hosts), random.hpp, and testing.hpp (GoogleTest).
#pragma once

#include "isograd/cxx20.hpp"

#include "isograd/checkpoint.hpp"
#include "isograd/context_parallel.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/differentiable.hpp"
#include "isograd/error.hpp"
#include "isograd/expert_parallel.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/loss.hpp"
#include "isograd/mesh.hpp"
#include "isograd/module.hpp"
#include "isograd/norm.hpp"
#include "isograd/normalizer.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/own_loop.hpp"
#include "isograd/pipeline_modules.hpp"
#include "isograd/plan.hpp"
#include "isograd/ranking.hpp"
#include "isograd/sampler.hpp"
#include "isograd/step.hpp"
#include "isograd/tensor_parallel.hpp"
#include "isograd/token_losses.hpp"
#include "isograd/trainer.hpp"
#include "isograd/verify_module.hpp"
#include "isograd/world.hpp"
