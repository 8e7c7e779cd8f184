// Everything a user of the library needs. One header per noun; this one includes them all.
#pragma once

#include "isograd/batch.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/decoder_lm.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"
#include "isograd/loss.hpp"
#include "isograd/norm.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/parameters.hpp"
#include "isograd/random.hpp"
#include "isograd/step.hpp"
#include "isograd/text_data.hpp"
#include "isograd/trainer.hpp"
#include "isograd/verify.hpp"
#include "isograd/world.hpp"
