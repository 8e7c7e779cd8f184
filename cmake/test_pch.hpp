// Included by nearly every test.
#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <mutex>
#include <thread>

#include "pch.hpp"
